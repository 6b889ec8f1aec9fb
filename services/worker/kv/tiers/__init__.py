"""Where the bytes of cached blocks lie and how they get there: tensors, files, one thread."""
