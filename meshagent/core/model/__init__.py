"""The values that agents exchange and keep: messages, attachments, identities, records."""
