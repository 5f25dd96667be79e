"""Starting workers, the loop they run, the links between them."""
