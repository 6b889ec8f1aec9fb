"""Workers that lend KV to each other and settle their debts: real decisions, simulated time."""
