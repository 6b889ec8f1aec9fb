"""All messages on the bus. Import each from the module that defines it."""
