#!/bin/sh
sed -i s/storm/sand/ cherry.log
