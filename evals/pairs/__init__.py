"""Gets the files of pairs that `stepspec pair build` builds, where the Hugging Face Hub cannot be reached."""
