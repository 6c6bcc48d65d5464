"""OpenVINO as an engine: claims of operators, conversion to its models, options, the disk cache."""
