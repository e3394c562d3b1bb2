"""A package, so that its server, a fixture of scope `package`, ends with its last test."""
