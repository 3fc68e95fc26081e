"""What travels on a link: the grammar of frames, and their bytes."""
