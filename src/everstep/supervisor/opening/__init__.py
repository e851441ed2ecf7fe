"""From the arguments of a start to its first step: what is compared, restored, or begun anew."""
