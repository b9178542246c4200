"""Does importance depend on the input?"""
