"""What is measured: `python -m bench NAME`. It may import services and shared; nobody imports it."""
