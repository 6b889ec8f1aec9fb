"""The data that benches can read: what there is, where from, under which licence. None of it is here."""
