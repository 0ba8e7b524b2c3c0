"""What ``checkpoint`` covers, and which results it keeps."""
