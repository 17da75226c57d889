"""One save: copy the state, share the work, write it beside the training, remove what is old."""
