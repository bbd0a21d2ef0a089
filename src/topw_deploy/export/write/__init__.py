"""Write the files of an export."""
