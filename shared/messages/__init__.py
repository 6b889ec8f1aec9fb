"""Every message that travels on the bus. Import from the module that defines it."""
