"""Trains `models/tiny_chat`: corpus, tokenizer, training loop, export and evaluation.

Run as `python -m models.train_tiny_chat.train`; nothing here is imported by a service.
"""
