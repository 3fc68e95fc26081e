"""Messages in SQLite: the tables are a projection of the commit log."""
