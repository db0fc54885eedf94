"""What is compared: ours, its peers, and Hugging Face."""
