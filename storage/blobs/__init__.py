"""Attachments on disk, named by their SHA-256."""
