"""What a decoder is: its shape and layer structure, read from a model folder."""
