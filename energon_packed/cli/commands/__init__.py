"""The commands: each module has a click command with the name `command`."""
