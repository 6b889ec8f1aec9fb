"""Workers that lend KV memory to each other and settle debts: live decisions in simulated time."""
