#!/bin/sh
sed -i s/melon/meadow/ badger.txt
