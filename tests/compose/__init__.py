"""The stack in real containers: `make compose-test`. Not collected by pytest."""
