"""C++ for the CPU's hot path: a plain C ABI over raw memory, compiled once where it runs."""
