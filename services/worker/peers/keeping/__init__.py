"""Host memory lent for other workers' prefix caches: kept for them, and used by this one's."""
