"""Every use of a library's private names: a section each, with the version, the reason, and when it can be removed."""
