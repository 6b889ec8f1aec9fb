"""Benches on real processes of this machine: whole stacks under load, with sides taking turns."""
