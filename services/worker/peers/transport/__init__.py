"""The bulk plane: tensors between workers, past the message bus (`docs/bulk.md`, decision 0016)."""
