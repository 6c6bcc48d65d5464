"""ONNX Runtime as an engine: claims of operators, conversion to ONNX, options."""
