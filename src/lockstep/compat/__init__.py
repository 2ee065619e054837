"""Every use of a library's private names, a section each: the version, the reason, and when to remove it."""
