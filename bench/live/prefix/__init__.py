"""What the prefix cache finds, saves and costs."""
