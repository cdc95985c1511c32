"""People: users, departments as a tree, roles bound to it, tokens, and the one permission policy."""
