"""C++ code for CPUs with a C ABI over raw memory, compiled on the machine that runs it."""
