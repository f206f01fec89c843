"""What a checkpoint is made of: the format of its files, and how a folder gets them whole."""
