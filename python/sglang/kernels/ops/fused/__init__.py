"""Row-wise operations between the matrix products, each one launch."""
