"""Keys of clients that live in a file: what one is, and how the file is read and changed."""
