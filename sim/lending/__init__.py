"""Workers that lend KV to each other and settle their debts, in virtual time. Simulated cost, real decisions."""
