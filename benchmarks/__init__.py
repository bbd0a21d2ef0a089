"""The measurements that the docs quote, and their workers (`*_worker`)."""
