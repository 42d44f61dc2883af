"""The operating system: folders of this user alone, children that end with their parent."""
