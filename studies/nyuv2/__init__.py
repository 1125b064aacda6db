"""The figure of the study of NYU-v2's own scenes."""
