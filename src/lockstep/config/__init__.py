"""What a command line asks for: composed, checked and named, without torch."""
