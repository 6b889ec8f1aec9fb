"""The local stack: nats-server, six services and N workers as processes of this machine, and its commands."""
