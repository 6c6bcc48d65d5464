"""Python bytecode to fx graphs of torch calls, the facts they rely on, what runs between them."""
