import shared  # noqa: F401  # refuses a Python that cannot run this
