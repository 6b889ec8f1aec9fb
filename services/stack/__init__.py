"""Local stack: nats-server, six services and N workers as processes of one machine, and its commands."""
