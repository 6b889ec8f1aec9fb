"""What gateway, bus and scheduler add to the engine."""
