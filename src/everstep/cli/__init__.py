"""The commands: thin, they read what the library offers."""
