"""The public contract: what users write down, type, read and keep, recorded in contract.json and compared here.

python -m tests.contract.record            prints how the working tree differs from the record
python -m tests.contract.record --write    records it as it is now
python -m tests.contract.store             keeps samples of every file format, written by this version
"""
