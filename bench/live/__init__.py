"""Benches on real processes of this machine: whole stacks under load, one side against another by turns."""
