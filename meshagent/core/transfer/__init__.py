"""Attachments in chunks, both ways."""
