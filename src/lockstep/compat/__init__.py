"""Every use of a library's private names: one file each, with the version, the reason, and when it can be removed."""
