"""What benches share: stacks, cores, load, models, turns, statistics, pictures, records. Knows no bench."""
