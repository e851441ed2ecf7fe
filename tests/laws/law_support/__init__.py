"""What the tests of the laws share: training scripts to kill, a server that starts them, kill campaigns."""
